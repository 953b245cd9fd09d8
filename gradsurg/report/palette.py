"""The colours of the figures: Okabe and Ito's, told apart by all kinds of colour vision."""

TREATED, CONTROL, UNCLEAR, INK = "#0072B2", "#D55E00", "#767676", "#222222"
PARETO, END = "#CC79A7", "#E69F00"
ARMS = (TREATED, CONTROL, "#009E73", PARETO, END, "#56B4E9", INK)
