"""Run published claims again and compare the results with bands stated beforehand."""
