"""What the plugin changes in torch's data-parallel training."""
