"""Commands on identities: logins, tokens and certificates."""
