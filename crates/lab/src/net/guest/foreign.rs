//! Objects of other programs in a host's kernel: they must survive when Weft starts, dies and stops.

use weft_bench::sandbox::Netns;

/// Objects of another program's.
const PLANTED: [&str; 11] = [
    "ip xfrm state add src 198.51.100.1 dst 198.51.100.2 proto esp spi 0x1001 reqid 77 mode transport \
     aead 'rfc4106(gcm(aes))' 0x0102030405060708090a0b0c0d0e0f1011121314 128",
    "ip xfrm policy add src 198.51.100.1/32 dst 198.51.100.2/32 dir out \
     tmpl src 198.51.100.1 dst 198.51.100.2 proto esp reqid 77 mode transport",
    "nft 'add table inet foreign; \
     add chain inet foreign out { type filter hook output priority 0 ; }; \
     add rule inet foreign out udp dport 9 drop'",
    "ip link add foreign-br type bridge",
    "ip link set foreign-br up",
    "ip link add foreign-vx type vxlan id 1 dstport 4789 local 192.0.2.200 nolearning",
    "ip link set foreign-vx master foreign-br up",
    "bridge fdb append 02:00:00:00:00:77 dev foreign-vx dst 198.51.100.7",
    "ip link add foreign-d type dummy",
    "ip addr add 198.51.100.1/24 dev foreign-d",
    "ip link set foreign-d up",
];

/// Commands that show whether they exist; none of them shows packet counts or times.
const SHOWN: [&str; 8] = [
    "ip xfrm state list reqid 77",
    "ip xfrm policy | grep -A3 'src 198.51.100.1/32'",
    "nft -s list table inet foreign",
    "ip -o link show foreign-br | cut -d: -f2-",
    "ip -j -d link show foreign-vx | jq -S '.[0] | [.master, .address, .operstate, .linkinfo.info_data]'",
    "bridge fdb show dev foreign-vx",
    "ip -o addr show foreign-d",
    "ip -o route show 198.51.100.0/24",
];

/// Commands that list everything that Weft touches in a namespace, without counters and times.
const EVERYTHING: [&str; 8] = [
    "ip xfrm state | grep -v anti-replay",
    "ip xfrm policy",
    "nft -s list ruleset",
    "ip -j link | jq -r '.[].ifname' | sort",
    "ip -o addr | awk '{print $2, $3, $4}' | sort",
    "ip -o route; ip -6 -o route | grep -v fe80",
    "iptables-save 2>/dev/null | grep '^[-:]' | sed 's/ \\[.*//'; ip6tables-save 2>/dev/null | grep '^[-:]' | sed 's/ \\[.*//'",
    "ss -Hlun | awk '{print $4}' | sort",
];

/// Puts another program's objects into a namespace.
///
/// # Errors
/// Returns an error if a command fails.
pub fn plant(netns: &Netns) -> anyhow::Result<()> {
    for command in PLANTED {
        netns.exec(&["bash", "-c", command])?.success()?;
    }
    Ok(())
}

/// A listing of another program's objects; it stays the same unless something changes them.
///
/// # Errors
/// One of them is gone.
pub fn shown(netns: &Netns) -> anyhow::Result<String> {
    dump(netns, &SHOWN, true)
}

/// Everything in a namespace that Weft could have left something in.
///
/// # Errors
/// A command does not start.
pub fn everything(netns: &Netns) -> anyhow::Result<String> {
    dump(netns, &EVERYTHING, false)
}

/// Lines of `now` that are not in `before`, and of `before` that are not in `now`.
#[must_use]
pub fn difference(before: &str, now: &str) -> String {
    let missing = before.lines().filter(|line| !now.lines().any(|other| other == *line));
    let added = now.lines().filter(|line| !before.lines().any(|other| other == *line));
    let missing = missing.map(|line| format!("gone: {line}"));
    missing.chain(added.map(|line| format!("new: {line}"))).collect::<Vec<_>>().join("\n")
}

fn dump(netns: &Netns, commands: &[&str], strict: bool) -> anyhow::Result<String> {
    let mut text = String::new();
    for command in commands {
        let output = netns.exec(&["bash", "-o", "pipefail", "-c", command])?;
        let output = if strict { output.success()? } else { output };
        anyhow::ensure!(!strict || !output.stdout.trim().is_empty(), "`{command}` shows nothing");
        text.push_str(&format!("# {command}\n{}", output.stdout));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_go_both_ways() {
        assert_eq!(difference("a\nb\n", "b\nc\n"), "gone: a\nnew: c");
        assert_eq!(difference("a\n", "a\n"), "");
    }
}
