"""Well-known balancers as presets, to compare with: same filters, no prices, another picker."""
