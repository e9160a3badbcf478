"""What pages and pictures draw alike, as data: bars with intervals, and points over rounds or trials."""
