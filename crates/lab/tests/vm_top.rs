//! `weft top` where the kernel engine moves packets and Weft sees none of them.

use std::net::IpAddr;
use std::time::Duration;

use serde_json::Value;
use weft_lab::net::guest::Stage;
use weft_lab::net::iperf::{self, Server};

/// An SA that lives so short is replaced while the test looks.
const OPTIONS: [&str; 4] = ["--engine", "kernel", "--rekey-seconds", "5"];
/// A rate that an emulated processor seals with ease, in bits per second.
const RATE: &str = "4M";

#[test]
fn the_kernels_sas_give_the_rates_of_a_peer_also_while_they_are_replaced() -> anyhow::Result<()> {
    let stage = Stage::pair(&OPTIONS, &OPTIONS)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let to: IpAddr = two.ipv4()?.into();
    let _server = Server::start(&two)?;
    let flow = std::thread::spawn(move || iperf::run(&one, to, &["-b", RATE, "-t", "30"]));
    std::thread::sleep(Duration::from_secs(5));
    let top = ["top", "--json", "--count", "6", "--interval", "3"];
    let output = stage.host(0).weft(&top)?.success()?;
    let lines: Vec<Value> =
        output.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let report = flow.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    let wanted = iperf::received_bps(&report);
    assert_eq!(lines.len(), 6);
    let (mut bits, mut seconds, mut of_the_kernel) = ([0.0; 2], 0.0, 0);
    for line in &lines {
        let (peer, container) = (&line["peers"][0], &line["containers"][0]);
        // A guest that stands still for seconds may be seen with a path that is not active.
        let engine = peer["engine"].as_str();
        assert!(matches!(engine, None | Some("kernel")), "{line}");
        of_the_kernel += usize::from(engine.is_some());
        for (of, bits) in [peer, container].into_iter().zip(&mut bits) {
            let bps = of["sent_bps"].as_f64().unwrap_or(0.0);
            assert!(bps > 0.0, "{line}");
            *bits += bps * line["interval_ms"].as_f64().unwrap_or(0.0) / 1e3;
        }
        seconds += line["interval_ms"].as_f64().unwrap_or(0.0) / 1e3;
        assert!(peer["received_pps"].as_f64().is_some_and(|pps| pps > 0.0), "{line}");
    }
    assert!(of_the_kernel > lines.len() / 2, "{lines:?}");
    // A busy machine carries more in one interval than in the next.
    for bps in bits.map(|bits| bits / seconds) {
        assert!(bps > wanted / 2.0 && bps < wanted * 2.0, "iperf3 says {wanted}, top {bps}");
    }
    let counters = stage.host(0).weft_json(&["report"])?;
    assert!(counters["counters"]["rekeys"].as_u64() > Some(1), "no SA was replaced: {counters}");
    Ok(())
}
