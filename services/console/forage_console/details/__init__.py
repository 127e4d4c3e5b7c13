"""What the pages Step, Trajectory and Group show."""
