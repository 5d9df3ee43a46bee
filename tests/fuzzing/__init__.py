"""Files of every format, changed in every way: refused in one sentence, quickly and in little memory, or harmless."""
