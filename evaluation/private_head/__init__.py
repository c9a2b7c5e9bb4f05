"""Linear heads trained with differential privacy on features of a frozen encoder.

Full-batch methods of Mehta, Krichene, Thakurta, Kurakin and Cutkosky 2022 (arXiv 2211.13403): a handful of statistics, each
noised once, all of them together one Gaussian mechanism.
"""
