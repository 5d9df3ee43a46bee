"""Lab: data, training, sweeps, tuning, tables, reports and the command line."""
