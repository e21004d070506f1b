"""Reading users' CSV files into domain values; sending them is the caller's business."""
