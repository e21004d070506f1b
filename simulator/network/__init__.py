"""Jobs that come and go over a network, at the rates that they have where they meet on links."""
