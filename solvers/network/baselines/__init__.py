"""What Crux is compared with: each module's ``plan`` answers the same question in another way."""
