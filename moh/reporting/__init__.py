"""From recorded runs to tables, figures and the report: nothing here trains or measures."""
