"""The ports of etcd's members: two clusters that start at the same time never get the same one."""

import random

from examples.cluster import etcd


class Holder:
    """Who has ports."""


def test_port_is_given_once_while_its_holder_lives() -> None:
    first, second = Holder(), Holder()
    state = random.getstate()
    given = etcd.free_ports(3, "127.0.0.1", first)
    random.setstate(state)
    assert not set(given) & set(etcd.free_ports(3, "127.0.0.1", second))
