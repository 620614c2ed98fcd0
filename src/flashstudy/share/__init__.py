"""What people see: figures, tables, verdicts, offline pages and the site. Nothing here measures."""
