"""Recipes for the tables and figures of the paper, the code that runs them and the code that renders them."""
