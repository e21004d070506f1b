"""Channels to a Tessera server, with the identity of whoever opens them."""

from tessera.client.channels import check_files as check_files
from tessera.client.channels import is_loopback as is_loopback
from tessera.client.channels import is_on_this_machine as is_on_this_machine
from tessera.client.channels import open_async_channel as open_async_channel
from tessera.client.channels import open_channel as open_channel
from tessera.client.logins import Login as Login
from tessera.client.logins import forget_login as forget_login
from tessera.client.logins import load_login as load_login
from tessera.client.logins import save_login as save_login
from tessera.client.refusals import ChannelRefused as ChannelRefused
from tessera.client.settings import PLAIN_TEXT as PLAIN_TEXT
from tessera.client.settings import ChannelSettings as ChannelSettings
from tessera.client.settings import find_settings as find_settings
