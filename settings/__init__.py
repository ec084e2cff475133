"""Files that people write settings in: read with places, checked strictly, and told what is wrong line by line."""
