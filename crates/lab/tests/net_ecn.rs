//! Congestion marks and DSCP through the vector engine (RFC 6040), with marks set on the underlay by
//! nftables and judged by the containers' own TCP.

use std::net::IpAddr;

use weft_bench::sandbox::{Container, Netns, Underlay};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, counter, nft_packets};

/// The counters belong to the vector engine.
const VECTOR: [&str; 2] = ["--engine", "userspace"];
/// DSCP "expedited forwarding" and ECT(0), as ping takes them.
const EF_ECT0: &str = "0xba";

/// Rules on a host's way out to the other's vector engine, with named counters. Of a lane beyond the first only one
/// end is a data port.
struct Rules<'a>(&'a Netns);

impl<'a> Rules<'a> {
    /// `mark` comes before the counting.
    fn load(lab: &Lab, netns: &'a Netns, mark: &str) -> anyhow::Result<Self> {
        let file = lab.sandbox.directory().join(format!("{}.nft", netns.name()));
        let text = format!(
            "add table inet lab\n\
             delete table inet lab\n\
             table inet lab {{\n\
               counter ect0 {{ }}\n counter ce {{ }}\n counter ef {{ }}\n counter dscp {{ }}\n\
               chain data {{\n\
                 {mark}\n\
                 ip ecn ect0 counter name ect0\n\
                 ip ecn ce counter name ce\n\
                 ip dscp ef counter name ef\n\
                 ip dscp != cs0 counter name dscp\n\
               }}\n\
               chain out {{\n\
                 type filter hook output priority 0\n\
                 udp dport 6784 jump data\n\
                 udp dport != 6784 udp sport 6784 jump data\n\
               }}\n\
             }}\n"
        );
        std::fs::write(&file, text)?;
        netns.exec(&["nft", "-f", &file.to_string_lossy()])?.success()?;
        Ok(Self(netns))
    }

    fn count(&self, name: &str) -> anyhow::Result<u64> {
        nft_packets(self.0, name)
    }
}

/// One number of the container's own network stack.
fn of_stack(container: &Container, name: &str) -> anyhow::Result<u64> {
    let shown = container.exec(&["nstat", "-asz", "-j"])?.success()?.json()?;
    let found = shown["kernel"][name].as_u64();
    found.ok_or_else(|| anyhow::anyhow!("no counter {name} in {shown}"))
}

/// Has TCP ask for congestion marks instead of drops.
fn use_ecn(container: &Container) -> anyhow::Result<()> {
    container.exec(&["sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_ecn"])?.success()?;
    Ok(())
}

/// The packets that answered, of three.
fn ping(from: &Container, to: IpAddr, tos: &str) -> anyhow::Result<usize> {
    let to = to.to_string();
    let words = ["ping", "-n", "-c", "3", "-i", "0.2", "-W", "1", "-Q", tos, &to];
    Ok(from.exec(&words)?.stdout.matches("bytes from").count())
}

fn marks_slow_tcp_down(underlay: Underlay) -> anyhow::Result<()> {
    let lab = Lab::pair(&VECTOR)?;
    lab.sandbox.set_underlay(underlay)?;
    let (one, two) = lab.containers()?;
    use_ecn(&one)?;
    use_ecn(&two)?;
    let _server = Server::start(&two)?;
    let to = two.ipv4()?.into();
    let rules = Rules::load(&lab, lab.host(0).netns(), "")?;
    iperf::run(&one, to, &["-n", "2M"])?;
    assert!(rules.count("ect0")? > 0, "the outer headers do not say that TCP takes marks");
    assert_eq!(rules.count("ce")?, 0);
    assert_eq!((of_stack(&two, "IpExtInCEPkts")?, of_stack(&one, "TcpExtTCPDeliveredCE")?), (0, 0));
    // A router with a full queue, for a while.
    let rules = Rules::load(&lab, lab.host(0).netns(), "ip ecn ect0 ip ecn set ce")?;
    iperf::run(&one, to, &["-n", "2M"])?;
    assert!(rules.count("ce")? > 0);
    assert!(of_stack(&two, "IpExtInCEPkts")? > 0, "no mark came to the receiver");
    assert!(of_stack(&one, "TcpExtTCPDeliveredCE")? > 0, "the sender was not told (ECE)");
    // TCP over IPv6 inside: the same outer header.
    let before = of_stack(&two, "Ip6InCEPkts")?;
    iperf::run(&one, two.ipv6()?.into(), &["-n", "2M"])?;
    assert!(of_stack(&two, "Ip6InCEPkts")? > before, "no mark came to the receiver over IPv6");
    assert_eq!(counter(lab.host(1), "drop_ce_over_not_ect")?, 0);
    Ok(())
}

#[test]
fn marks_of_the_underlay_reach_the_containers_tcp_and_its_sender() -> anyhow::Result<()> {
    marks_slow_tcp_down(Underlay::Veth)
}

#[test]
fn marks_on_datagrams_that_are_put_together_again_do_so_too() -> anyhow::Result<()> {
    marks_slow_tcp_down(Underlay::Wire)
}

#[test]
fn a_mark_on_a_packet_that_takes_none_drops_it() -> anyhow::Result<()> {
    let lab = Lab::pair(&VECTOR)?;
    let (one, two) = lab.containers()?;
    let to = two.ipv4()?.into();
    one.ping(to)?;
    let _rules = Rules::load(&lab, lab.host(0).netns(), "ip ecn set ce")?;
    assert_eq!(ping(&one, to, "0x02")?, 3, "ECT(0) marked CE is delivered");
    assert_eq!(ping(&one, to, "0x00")?, 0, "Not-ECT marked CE is not");
    assert!(counter(lab.host(1), "drop_ce_over_not_ect")? >= 3);
    // Probes are no packets of a container: the path stays.
    lab.wait_active()?;
    Ok(())
}

#[test]
fn the_dscp_of_containers_is_seen_outside_only_where_it_was_asked_for() -> anyhow::Result<()> {
    for option in [&[][..], &["--copy-dscp"]] {
        let lab = Lab::pair(&[&VECTOR[..], option].concat())?;
        let (one, two) = lab.containers()?;
        let to: IpAddr = two.ipv4()?.into();
        one.ping(to)?;
        let rules = Rules::load(&lab, lab.host(0).netns(), "")?;
        let inside = Inside::load(&lab, &two)?;
        assert_eq!(ping(&one, to, EF_ECT0)?, 3);
        let (ef, any) = (rules.count("ef")?, rules.count("dscp")?);
        assert_eq!(ef, if option.is_empty() { 0 } else { 3 }, "{option:?}");
        // Containers' kernels send a few packets with a DSCP by themselves.
        assert_eq!(any > 0, !option.is_empty(), "{any} packets with {option:?}");
        assert!(rules.count("ect0")? >= 3, "ECN goes outside with and without the option");
        assert_eq!(inside.count()?, 3, "the packets arrive as they were sent, {option:?}");
    }
    Ok(())
}

/// Counts pings that come to a container with DSCP "expedited forwarding" and ECT(0).
struct Inside<'a>(&'a Container);

impl<'a> Inside<'a> {
    fn load(lab: &Lab, container: &'a Container) -> anyhow::Result<Self> {
        let file = lab.sandbox.directory().join("inside.nft");
        let text = "table inet lab {\n counter ef { }\n chain in {\n\
                    type filter hook input priority 0\n\
                    icmp type echo-request ip dscp ef ip ecn ect0 counter name ef\n }\n }\n";
        std::fs::write(&file, text)?;
        container.exec(&["nft", "-f", &file.to_string_lossy()])?.success()?;
        Ok(Self(container))
    }

    fn count(&self) -> anyhow::Result<u64> {
        Rules(self.0.netns()).count("ef")
    }
}
