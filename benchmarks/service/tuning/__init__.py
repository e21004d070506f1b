"""What tuning at launch costs and gives, really run on CPU devices."""
