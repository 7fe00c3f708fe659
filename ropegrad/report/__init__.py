"""Figures, tables and one page from records: nothing here measures, nothing is typed in by hand."""
