// What is wider than the page can be scrolled with the keyboard, and says so to screen readers.
const boxes = ".md-typeset__scrollwrap, .formula, pre > code"
const mark = () => {
  for (const box of document.querySelectorAll(boxes)) {
    if (box.scrollWidth > box.clientWidth + 1) {
      box.tabIndex = 0
      box.setAttribute("role", "region")
      box.setAttribute("aria-label", "Scrolls sideways")
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name)
    }
  }
}
new MutationObserver(mark).observe(document.querySelector("article"), { childList: true, subtree: true })
new ResizeObserver(mark).observe(document.body)
