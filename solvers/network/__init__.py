"""The network: which paths jobs take, who is served first where they meet (Crux); judged on a fluid model."""
