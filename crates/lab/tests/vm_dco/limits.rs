//! A key of the kernel's device that has reached its cipher's limit. The device knows no such limit: `weft dco`
//! reads its counters, deletes the key and reports it.

use std::thread;
use std::time::Duration;

use weft_bench::sandbox::Running;
use weft_crypto::ovpn::usage::AES_GCM_BLOCKS_MAX;

use crate::common::{DEVICE, dco, hear, line, listen};
use crate::pair::{PEER, Pair};

/// Blocks that a key may still do: more than a few pings cost, fewer than [`FLOOD`] does.
const LEFT_BLOCKS: u64 = 4_000;
const FLOOD: [&str; 7] = ["-f", "-c", "100", "-s", "1000", "-W", "20"];
/// The counters are read more than once meanwhile.
const READINGS: Duration = Duration::from_secs(5);
/// A device is made within this time.
const SOON: Duration = Duration::from_secs(10);
/// A device of the kernel and one in userspace. The kernel's keys have [`LEFT_BLOCKS`] left when they are
/// installed.
fn worn_pair() -> anyhow::Result<(Pair, Running)> {
    let pair = Pair::new()?;
    let done = (AES_GCM_BLOCKS_MAX - LEFT_BLOCKS).to_string();
    let words = ["dco", "hold", DEVICE, "--mode", "mp", "--engine=kernel"];
    let mut holder = pair.host(0).spawn_weft_with(&words, &[("WEFT_DCO_KEY_BLOCKS", &done)])?;
    holder.line_with(r#"{"Ready":"#, SOON)?;
    pair.meet()?;
    Ok((pair, holder))
}

#[test]
fn a_used_up_key_of_the_kernels_device_is_deleted_and_told() -> anyhow::Result<()> {
    let (pair, _holder) = worn_pair()?;
    let host = pair.host(0);
    let mut told = listen(host)?;
    hear(host, &mut told)?;
    pair.key("primary", "aes-256-gcm")?;
    // This cipher has no limit.
    pair.key("secondary", "chacha20-poly1305")?;
    anyhow::ensure!(pair.pings(&["-c", "3", "-i", "0.2", "-W", "20"])?, "nothing is answered");
    thread::sleep(READINGS);
    let key = dco(host, &["get-key", DEVICE, PEER, "primary"])?;
    anyhow::ensure!(key["key-id"] == 0, "it is not used up yet: {key}");
    pair.pings(&FLOOD)?;
    pair.primary_is_told_and_gone(&mut told)?;
    anyhow::ensure!(!pair.pings(&["-c", "1", "-W", "1"])?, "something is sealed still");
    // The other one takes its place, and has no end.
    pair.both(&["swap-keys", DEVICE, PEER])?;
    pair.pings(&FLOOD)?;
    thread::sleep(READINGS);
    anyhow::ensure!(pair.pings(&["-c", "3", "-i", "0.2", "-W", "20"])?, "nothing is answered");
    pair.both(&["del-iface", DEVICE])?;
    let more = line(&mut told)?;
    anyhow::ensure!(more["name"] == "peer-del-ntf", "one key was told of once: {more}");
    Ok(())
}
