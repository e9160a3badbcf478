"""Plans, machines and profiles as text and pictures; pure."""
