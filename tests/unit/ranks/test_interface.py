"""Ranks of several machines connect over the interface that a launcher's address is of."""

import os
import socket
import sys

import psutil
import pytest

from learner.distributed.collectives import VARIABLE, choose_interface, interface_of
from pipeline.runtime.process import ADDRESS


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (ADDRESS, VARIABLE):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "192.0.2.1", "::1"])
def test_loopback_and_addresses_of_others_have_no_interface(address):
    assert interface_of(address) is None


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the interface of an address")
def test_an_address_of_this_machine_has_the_interface_that_the_system_names():
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                assert interface_of(each.address) == name


def test_the_address_of_a_launcher_decides_unless_the_user_has_chosen(monkeypatch):
    monkeypatch.setattr("learner.distributed.collectives.interface_of", {"10.0.0.1": "eth1"}.get)
    choose_interface()
    assert VARIABLE not in os.environ
    monkeypatch.setenv(ADDRESS, "10.0.0.2")
    choose_interface()
    assert VARIABLE not in os.environ
    monkeypatch.setenv(ADDRESS, "10.0.0.1")
    choose_interface()
    assert os.environ[VARIABLE] == "eth1"
    monkeypatch.setenv(VARIABLE, "eth0")
    choose_interface()
    assert os.environ[VARIABLE] == "eth0"
