"""Exact distribution functions and limits of a proportion, for every package that states an interval. numpy only."""
