//! Runs of UDP datagrams that a container gives its kernel in one call (UDP_SEGMENT), as QUIC does. They cross
//! the vector engine as super-packets, and every datagram arrives by itself.

use std::net::{IpAddr, SocketAddr};

use weft_bench::sandbox::Container;
use weft_io::namespace::{Namespace, run_in};
use weft_io::udp::{RUN_BYTES_MAX, UdpSocket};
use weft_io::uninterrupted;
use weft_lab::net::probe::udp_in;
use weft_lab::net::{Lab, counter, namespace};

/// Runs of each size.
const RUNS: usize = 8;
/// Datagrams of a run; the kernel takes 64 at most.
const DATAGRAMS_MAX: usize = 45;

#[test]
fn runs_of_datagrams_cross_whole_and_arrive_one_by_one() -> anyhow::Result<()> {
    for ports in ["bridge", "direct"] {
        let lab = Lab::pair(&["--engine=userspace", "--port-mode", ports])?;
        let (one, two) = lab.containers()?;
        one.ping(two.ipv4()?.into())?;
        one.ping(two.ipv6()?.into())?;
        let pairs: [(IpAddr, IpAddr); 2] =
            [(one.ipv4()?.into(), two.ipv4()?.into()), (one.ipv6()?.into(), two.ipv6()?.into())];
        let calls = || counter(lab.host(0), "runs_sent");
        let (before, mut datagrams) = (calls()?, 0);
        for (from, to) in pairs {
            // The longest that an MTU of 1388 takes under either family's headers is the last.
            for segment in [1, 2, 511, 1200, if to.is_ipv4() { 1360 } else { 1340 }] {
                datagrams += arrive((&one, from), (&two, to), segment)?;
            }
        }
        let status = lab.host(0).weft_json(&["status"])?;
        let works = &status["offloads"]["tap-uso"];
        anyhow::ensure!(works.is_boolean(), "no word of USO in {status}");
        if works == true {
            // Other packets, such as those of neighbour discovery, are few.
            let sent = calls()? - before;
            assert!(sent < datagrams as u64 / 4, "{sent} calls for {datagrams} datagrams, {ports}");
        }
    }
    Ok(())
}

/// Sends runs of datagrams of `segment` bytes; the last one of each run is shorter if possible. Checks that each
/// arrives unchanged and in order. Returns how many there were.
fn arrive(
    (one, from): (&Container, IpAddr),
    (two, to): (&Container, IpAddr),
    segment: usize,
) -> anyhow::Result<usize> {
    let receiver = udp_in(&namespace(two), SocketAddr::new(to, 0))?;
    let sender =
        run_in(Namespace::open(&namespace(one))?, move || UdpSocket::bind(Some(from), 0))??;
    let remote = sender.remote(receiver.local_addr()?)?;
    let count = DATAGRAMS_MAX.min(RUN_BYTES_MAX / segment);
    let last = segment.div_ceil(2);
    let mut buffer = vec![0; segment + 1];
    for run in 0..RUNS {
        let length = segment * (count - 1) + last;
        let bytes: Vec<u8> = (0..length).map(|at| ((at * 31 + run * 7) % 251) as u8).collect();
        sender.send_run(&bytes, segment, &remote)?;
        for (number, sent) in bytes.chunks(segment).enumerate() {
            let (length, _) = uninterrupted(|| receiver.recv_from(&mut buffer))?;
            anyhow::ensure!(
                buffer[..length] == *sent,
                "datagram {number} of run {run}: {length} bytes instead of {} of {segment}",
                sent.len()
            );
        }
    }
    Ok(RUNS * count)
}
