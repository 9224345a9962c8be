"""What users would run instead of headwater, written plainly."""
