"""The network: which paths jobs take and who is served first where they meet (Crux), judged on a fluid model."""
