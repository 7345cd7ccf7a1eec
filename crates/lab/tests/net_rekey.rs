//! Rekeying under load: not one packet lost, not one retransmission caused.

use std::time::Duration;

use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{
    Lab, counter, is_soak, keep_order, losses, namespace, probe, resend_on_loss_alone, slowness,
    wait_connection,
};

#[test]
fn rekeying_every_two_seconds_loses_nothing_and_causes_no_retransmission() -> anyhow::Result<()> {
    let seconds: u32 = if is_soak() { 120 } else { 9 };
    let lab = Lab::pair(&["--rekey-seconds", "2"])?;
    let (one, two) = lab.containers()?;
    let ends = [lab.host(0).netns(), lab.host(1).netns(), one.netns(), two.netns()];
    keep_order(ends)?;
    let _server = Server::start(&two)?;
    one.ping(two.ipv4()?.into())?;
    resend_on_loss_alone(&one)?;
    let before = counter(lab.host(1), "rekeys")?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    let target = receiver.local_addr()?;
    // 200 Mbit/s of TCP: enough that packets are under way at each change. It is little enough that no queue of
    // this machine overflows and causes a retransmission.
    let rate = format!("{}M", 200 / slowness());
    let arguments = ["-t", &seconds.to_string(), "-b", &rate, "-C", "cubic"];
    let report = std::thread::scope(|scope| {
        let load = scope.spawn(|| iperf::run(&one, two.ipv4()?.into(), &arguments));
        let mut lost = Vec::new();
        for number in 0_u32.. {
            if load.is_finished() {
                break;
            }
            sender.send_to(&number.to_be_bytes(), target)?;
            if probe::expect_datagram(&receiver, &number.to_be_bytes()).is_err() {
                lost.push(number);
            }
            std::thread::sleep(Duration::from_micros(2_300));
        }
        anyhow::ensure!(lost.is_empty(), "datagrams {lost:?} were lost");
        load.join().map_err(|_| anyhow::anyhow!("iperf3 panicked"))?
    })?;
    let rekeys = counter(lab.host(1), "rekeys")? - before;
    assert!(rekeys >= u64::from(seconds) / 2 - 1, "{rekeys} rekeys in {seconds} s");
    assert_eq!(
        iperf::retransmits(&report),
        Some(0),
        "{}",
        losses::told(&lab, [&one, &two], &report)?
    );
    wait_connection(lab.host(0), "an active path", Duration::from_secs(1), |c| {
        c["state"] == "active"
    })?;
    Ok(())
}
