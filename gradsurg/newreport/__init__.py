"""Reports: from the files of runs to text, tables, figures and a page."""
