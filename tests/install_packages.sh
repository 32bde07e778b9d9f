#!/bin/bash
# Install Debian packages for the tests, as root, and leave the machine's services as they were.
#
#   install_packages.sh PACKAGE...
#
# Some of the packages have a daemon, which Debian starts at the installation and at each boot. The tests start their own,
# on other ports and below their own directories. So policy-rc.d refuses the start during the installation, for these
# daemons alone, and their units are disabled afterwards. Only packages that are installed here are concerned: a
# Prometheus that the machine had before goes on, and so does a policy-rc.d that is there.
set -euo pipefail

DAEMONS="prometheus prometheus-node-exporter ceph-mon ceph-mgr ceph-osd ceph-base containerd"
POLICY=${POLICY:-/usr/sbin/policy-rc.d}
# By default apt-get update succeeds even if it cannot fetch a list.
apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o APT::Update::Error-Mode=any -o Dpkg::Use-Pty=0 "$@"; }
fail() { echo "error: $*" >&2; exit 1; }
is_installed() { dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null | grep -q '^ii'; }

missing=(); for each in "$@"; do is_installed "$each" || missing+=("$each"); done
[ ${#missing[@]} -gt 0 ] || exit 0
[ "$(id -u)" = 0 ] || fail "packages are missing, and only root can install them: ${missing[*]}"
echo "installing: ${missing[*]}"

new=(); for each in $DAEMONS; do is_installed "$each" || new+=("$each"); done
if [ ! -e "$POLICY" ] && [ ! -L "$POLICY" ]; then
	trap 'rm -f "$POLICY"' EXIT
	printf '%s\n' '#!/bin/sh' '# by the tests of crust, for the time of one installation' \
		'case "$1" in prometheus*|ceph*|containerd*) exit 101;; esac' 'exit 0' >"$POLICY"
	chmod 755 "$POLICY"
fi

apt update || fail "the package lists cannot be fetched: check the network and /etc/apt"
apt install --no-install-recommends "${missing[@]}" || fail "the packages cannot be installed, see above"

command -v systemctl >/dev/null || exit 0
for each in "${new[@]}"; do
	is_installed "$each" || continue
	for unit in $(dpkg -L "$each" | grep -E '^(/usr)?/lib/systemd/system/[^/@]*\.(service|target|timer)$' | xargs -rn1 basename); do
		# not --now where systemd does not run: there is nothing to stop
		if [ -d /run/systemd/system ]; then systemctl --quiet disable --now "$unit"; else systemctl --quiet disable "$unit"; fi ||
			echo "warning: $unit of $each is not disabled" >&2
	done
done
