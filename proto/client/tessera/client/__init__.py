"""Channels to a Tessera server, with the identity of whoever opens them."""

from tessera.client.channels import open_async_channel as open_async_channel
from tessera.client.channels import open_channel as open_channel
from tessera.client.settings import ChannelSettings as ChannelSettings
from tessera.client.settings import find_settings as find_settings
