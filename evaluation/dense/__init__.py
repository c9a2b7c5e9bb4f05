"""Dense tasks on token maps of a frozen encoder: segmentation and detection with small heads, not private."""
