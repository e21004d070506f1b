"""Jobs that ran on a real cluster: their records, replays, and new decisions about them."""
