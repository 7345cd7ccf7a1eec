//! A profile goes to a phone as a QR code in a terminal. The referees are a decoder of pictures, and Debian's `openvpn`.

use anyhow::ensure;
use weft_bench::sandbox::progress::note;
use weft_lab::net::gateway::Stage;

/// Dots of the picture for each module of the code.
const DOTS: usize = 3;

/// The text of a QR code that stands in half blocks, as a camera sees them.
fn decoded(code: &str) -> anyhow::Result<String> {
    let lines: Vec<Vec<char>> = code.lines().map(|line| line.chars().collect()).collect();
    let (width, height) = (lines.first().map_or(0, Vec::len), lines.len() * 2);
    let grey = |x: usize, y: usize| {
        let half = if (y / DOTS).is_multiple_of(2) { '▀' } else { '▄' };
        let char = lines.get(y / DOTS / 2).and_then(|line| line.get(x / DOTS));
        if char.is_some_and(|char| [half, '█'].contains(char)) { 255 } else { 0 }
    };
    let (width, height) = (width * DOTS, height * DOTS);
    let mut picture = rqrr::PreparedImage::prepare_from_greyscale(width, height, grey);
    let grids = picture.detect_grids();
    ensure!(grids.len() == 1, "{} codes in {width} columns", grids.len());
    Ok(grids[0].decode()?.1)
}

#[test]
fn a_profile_that_is_read_from_a_qr_code_connects() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let host = stage.host();
    let shown = host.weft(&["openvpn", "client", "alice", "--qr"])?.success()?.stdout;
    let text = decoded(&shown)?;
    let columns = shown.lines().next().map_or(0, |line| line.chars().count());
    note(&format!("a profile of {} bytes takes {columns} columns", text.len()));
    let path = stage.lab.sandbox.directory().join("scanned.ovpn");
    std::fs::write(&path, &text)?;
    let machine = stage.machine(1)?;
    let _alice = machine.connect(&path)?;
    machine.wait_ping(stage.two.ipv4()?.into())?;
    Ok(())
}
