"""Pipeline parallelism's schedules as data: made, completed, checked, timed and drawn without torch."""
