#!/usr/bin/env bash
# packages.sh: installs the Debian or Ubuntu packages that the cluster and its
# image builds need, if some are absent. Elsewhere it says which programs to install.
set -euo pipefail
declare -A packages=(
  [buildah]=buildah [mmdebstrap]=mmdebstrap [runc]=runc [nft]=nftables [iptables]=iptables [conntrack]=conntrack [socat]=socat
  [ethtool]=ethtool [ip]=iproute2 [ss]=iproute2 [kmod]=kmod [openssl]=openssl [cc]=gcc [flock]=util-linux [mountpoint]=util-linux
)
PATH=$PATH:/usr/sbin:/sbin
missing=()
for program in "${!packages[@]}"; do
  command -v "$program" > /dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0

wanted=()
for program in "${missing[@]}"; do wanted+=("${packages[$program]}"); done
fail() { echo "packages.sh: missing programs: ${missing[*]}; $1" >&2; exit 1; }
command -v apt-get > /dev/null || fail "no apt-get here: install them with this system's package manager"
[ "$(id -u)" = 0 ] || fail "as root: apt-get install --no-install-recommends ${wanted[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# libc6-dev: pause is linked statically.
apt-get install -q -y --no-install-recommends "${wanted[@]}" libc6-dev ca-certificates
