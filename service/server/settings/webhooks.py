"""The hosts to which webhooks may lead."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.service.server.webhooks.addresses import read_networks
from tessera.service.server.webhooks.sending import SendingOptions


@dataclass(frozen=True, kw_only=True)
class WebhookSettings:
    """The key of webhooks' secrets, and the hosts that webhooks may name."""

    webhook_key_file: str = ""
    """A file with at least 32 random characters, the same for all replicas, from which the secrets of
    webhooks are derived. Other users must not be able to read it. If it is empty, there are no
    webhooks. With another key, all secrets change.
    """
    webhook_networks: str = ""
    """Networks that are not public, such as 10.0.0.0/8, to which webhooks may lead. If it is empty,
    webhooks lead to public addresses only.
    """
    webhook_plain_http: bool = False
    """Whether the URLs of webhooks may begin with http://. Others can then read what they are sent."""
    webhook_authorities: str = ""
    """File of the authorities (PEM) that certificates of webhooks' hosts may be signed by. If it is
    empty, those of this machine.
    """

    def webhook_options(self) -> SendingOptions:
        """Return where webhooks may lead. Raises InvalidInput."""
        return SendingOptions(
            plain_http=self.webhook_plain_http,
            networks=read_networks("webhook_networks", self.webhook_networks),
            authorities=self.webhook_authorities,
        )
