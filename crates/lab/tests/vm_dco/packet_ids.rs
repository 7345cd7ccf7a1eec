//! A key of the kernel's device that has used up its packet ids.

use weft_lab::net::guest::{KernelMemory, PacketIds};
use weft_openvpn::device::{KeyBlock, Side};

use crate::common::{DEVICE, dco, hear, line, listen};
use crate::pair::{PEER, Pair};

#[test]
fn a_key_of_the_kernels_device_without_packet_ids_is_gone_and_told() -> anyhow::Result<()> {
    let pair = Pair::new()?;
    let host = pair.host(0);
    dco(host, &["new-iface", DEVICE, "--mode", "mp", "--engine=kernel"])?;
    pair.meet()?;
    let mut told = listen(host)?;
    hear(host, &mut told)?;
    pair.key("primary", "aes-256-gcm")?;
    pair.key("secondary", "chacha20-poly1305")?;
    anyhow::ensure!(pair.pings(&["-c", "1", "-W", "20"])?, "nothing is answered");
    let memory = KernelMemory::open()?;
    let block = KeyBlock::parse(&std::fs::read_to_string(pair.key_file())?)?;
    let (seals, opens) = block.directions(Side::Server, 32);
    let tails = [seals.nonce_tail, opens.nonce_tail].concat();
    let ids = PacketIds::find(&memory, &tails, 3, || {
        let words = ["-c", "3", "-i", "0.2", "-W", "20"];
        anyhow::ensure!(pair.pings(&words)?, "nothing is answered");
        Ok(())
    })?;

    ids.leave(1)?;
    anyhow::ensure!(pair.pings(&["-c", "1", "-W", "20"])?, "the last packet id is as good as any");
    let key = dco(host, &["get-key", DEVICE, PEER, "primary"])?;
    anyhow::ensure!(key["key-id"] == 0, "it has gone too early: {key}");
    anyhow::ensure!(!pair.pings(&["-c", "1", "-W", "1"])?, "something is sealed still");
    pair.primary_is_told_and_gone(&mut told)?;
    pair.both(&["swap-keys", DEVICE, PEER])?;
    anyhow::ensure!(pair.pings(&["-c", "3", "-i", "0.2", "-W", "20"])?, "nothing is answered");
    pair.both(&["del-iface", DEVICE])?;
    let more = line(&mut told)?;
    anyhow::ensure!(more["name"] == "peer-del-ntf", "one key was told of once: {more}");
    Ok(())
}
