"""Pipeline parallelism: schedules as data in ``schedule``, without torch; what runs them in ``runtime``."""
