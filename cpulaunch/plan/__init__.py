"""Deciding, pure: Host + LaunchRequest -> LaunchPlan. Nothing here reads or writes anything."""
