"""Rules about modules and the operations of their forward."""
