"""A recipe for every table and figure of the paper, what runs it and what renders it."""
