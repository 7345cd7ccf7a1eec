//! Instructions of the hot functions, counted by callgrind and held against a budget.
//!
//! `counts [--update]`: counts every function and prints a table; fails if one is over its budget
//! (`counts.toml` beside this crate's manifest). `counts run NAME`: what callgrind runs.
//!
//! Time moves with the machine, instructions do not. The AEAD's instructions are counted apart and have no
//! budget: its library picks its code by the processor, and callgrind's has no AVX-512.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::fmt::Write as _;
use std::hint::black_box;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use weft_crypto::{Cipher, ReplayWindow};
use weft_engine::alone::{ENDPOINTS, Lane, Load};
use weft_engine::dco::alone::PeerTable;
use weft_packet::coalesce::Coalescer;
use weft_packet::layout::{Layout, flow_hash};
use weft_packet::split::{FrameChecksum, Plan};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::vxlan::VxlanHeader;
use weft_packet::{esp, ethernet};

type Error = Box<dyn std::error::Error>;

/// Calls that are counted, after as many that are not.
const CALLS: u64 = 50;
/// A count may exceed its budget by this share before it fails, in percent. Other compilers and C libraries make
/// different code of the same source.
const TOLERANCE_PERCENT: f64 = 3.0;
/// The function that callgrind counts in. Nothing else may have this in its name.
const COUNTED: &str = "counted_section";
/// The two functions that seal and open; neither calls the other.
const AEAD_ENTRIES: [&str; 2] =
    ["weft_crypto::aead::AeadKey::seal", "weft_crypto::aead::AeadKey::open"];
/// The link of the super-packets: 45 segments of 1,336 bytes.
const LOAD: Load = Load::Tcp { link_mtu: 1500 };
/// The container's MTU on it, in bytes.
const MTU: usize = esp::inner_mtu(1500, esp::OVERHEAD_V6_UDP);
/// Two functions that do the same with little and with much data, and the percentage by which the second may
/// exceed the first. Hash tables find an entry at once, wherever it is.
const FLAT: (&str, &str, f64) = ("dco-look-up-1", "dco-look-up-4096", 3.0);

/// A function: its name, the unit that one call handles, and the code that runs it.
struct Function {
    name: &'static str,
    call: &'static str,
    run: fn() -> Result<(), Error>,
}

const FUNCTIONS: [Function; 10] = [
    Function { name: "seal", call: "a super-packet of 45 segments", run: seal },
    Function { name: "open", call: "a run of 45, opened, merged, written", run: open },
    Function { name: "seal-small", call: "a run of 64 datagrams of 64 B", run: seal_small },
    Function { name: "split", call: "plan and 45 headers", run: split },
    Function { name: "coalesce", call: "45 frames into one", run: coalesce },
    Function { name: "replay", call: "64 numbers in order", run: replay },
    Function { name: "look-up", call: "64 of 1,000 endpoints", run: look_up },
    Function { name: FLAT.0, call: "64 packets of 1 device peer", run: || dco_look_up(1) },
    Function { name: FLAT.1, call: "64 packets of 4,096 device peers", run: || dco_look_up(4_096) },
    Function { name: "parse", call: "the headers of one datagram", run: parse },
];

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [] => judge(false),
        ["--update"] => judge(true),
        ["run", name] => {
            let function = FUNCTIONS.iter().find(|function| function.name == name);
            (function.ok_or("there is no such function")?.run)()
        }
        _ => Err("counts [--update], or counts run NAME".into()),
    }
}

// ---- what is counted ----

#[inline(never)]
fn counted_section(work: &mut dyn FnMut()) {
    work();
}

/// Runs `work` half the times uncounted, so that one-time costs are not counted. `before` never is.
fn repeat<T>(mut subject: T, before: impl Fn(&mut T), work: impl Fn(&mut T)) {
    for _ in 0..CALLS {
        before(&mut subject);
        work(&mut subject);
    }
    for _ in 0..CALLS {
        before(&mut subject);
        counted_section(&mut || work(&mut subject));
    }
}

fn lane(load: Load) -> Result<Lane, Error> {
    Ok(Lane::new(Cipher::Aes256Gcm, load, 1)?)
}

fn seal() -> Result<(), Error> {
    repeat(lane(LOAD)?, |_| {}, Lane::seal);
    Ok(())
}

fn open() -> Result<(), Error> {
    repeat(lane(LOAD)?, Lane::fill, Lane::open);
    Ok(())
}

fn seal_small() -> Result<(), Error> {
    repeat(lane(Load::Udp { payload: 64 })?, |_| {}, Lane::seal);
    Ok(())
}

/// A super-packet: its virtio net header and its frame.
fn super_packet() -> Result<(VnetHeader, Vec<u8>), Error> {
    let lane = lane(LOAD)?;
    let mark = VnetHeader::parse(lane.read()).ok_or("no virtio net header")?;
    Ok((mark, lane.read()[vnet::LEN..].to_vec()))
}

fn split() -> Result<(), Error> {
    let (mark, frame) = super_packet()?;
    repeat(
        vec![0; ethernet::LEN + MTU],
        |_| {},
        |out| {
            let Ok(plan) = Plan::new(&mark, black_box(&frame), MTU) else { return };
            for index in 0..plan.segments {
                black_box(plan.write_header(&frame, index, false, out));
                black_box(plan.payload(index));
            }
        },
    );
    Ok(())
}

/// Frames one behind the other, where each stands, and how their checksums are.
type Frames = (Vec<u8>, Vec<Range<u32>>, FrameChecksum);

/// The frames of a super-packet.
fn frames() -> Result<Frames, Error> {
    let (mark, frame) = super_packet()?;
    let plan = Plan::new(&mark, &frame, MTU)?;
    let (mut arena, mut ranges) = (Vec::new(), Vec::new());
    for index in 0..plan.segments {
        let start = arena.len();
        arena.resize(start + plan.segment_frame_len(index), 0);
        let header_len = plan.write_header(&frame, index, false, &mut arena[start..]);
        arena[start + header_len..].copy_from_slice(&frame[plan.payload(index)]);
        ranges.push(start as u32..arena.len() as u32);
    }
    Ok((arena, ranges, plan.checksum))
}

fn coalesce() -> Result<(), Error> {
    let (arena, ranges, checksum) = frames()?;
    repeat(
        Coalescer::new(),
        |_| {},
        |coalescer| {
            for range in &ranges {
                let frame = &black_box(&arena)[range.start as usize..range.end as usize];
                let headers = Layout::parse(frame);
                let _ = black_box(coalescer.push(&arena, range.clone(), &headers, checksum));
            }
            coalescer.flush(&arena, |merged| {
                black_box(merged.frame_len);
            });
        },
    );
    Ok(())
}

fn replay() -> Result<(), Error> {
    repeat(
        ReplayWindow::new(),
        |_| {},
        |window| {
            let next = window.highest() + 1;
            for number in next..next + 64 {
                let sequence = window.infer(black_box(number as u32));
                if window.check(sequence).is_ok() {
                    window.mark(sequence);
                }
            }
        },
    );
    Ok(())
}

fn look_up() -> Result<(), Error> {
    let lane = lane(LOAD)?;
    repeat(
        0,
        |_| {},
        |known| {
            for number in 0..64 {
                let wanted = black_box(number * (ENDPOINTS / 64));
                *known += u32::from(lane.knows_endpoint(wanted));
            }
        },
    );
    Ok(())
}

/// Of the peers of a data channel device, and of a route to one of them.
fn dco_look_up(peers: u32) -> Result<(), Error> {
    let table = PeerTable::new(peers)?;
    repeat(
        0,
        |_| {},
        |found| {
            for number in 0..64 {
                let wanted = black_box(number * peers / 64);
                *found += u32::from(table.finds(wanted));
            }
        },
    );
    Ok(())
}

fn parse() -> Result<(), Error> {
    let (arena, ranges, _) = frames()?;
    let frame = &arena[ranges[0].start as usize..ranges[0].end as usize];
    let mut packet = vec![0; esp::packet_len(frame.len())];
    esp::Header { spi: 300, sequence_low: 1, iv: [0; 8] }.write(&mut packet);
    let plain = &mut packet[esp::HEADER_LEN..];
    let header = VxlanHeader { vni: 7, rco: None };
    esp::write_inner_headers(plain, 0xc001, weft_packet::vxlan::PORT, header, frame.len());
    let plain_len = esp::INNER_LEN + frame.len();
    plain[esp::INNER_LEN..plain_len].copy_from_slice(frame);
    esp::write_trailer(&mut plain[plain_len..], esp::trailer_len(plain_len) - 2);
    repeat(
        packet,
        |_| {},
        |packet| {
            let packet = black_box(&packet[..]);
            let _ = black_box(esp::Header::parse(packet));
            let plain = &packet[esp::HEADER_LEN..packet.len() - esp::ICV_LEN];
            let Ok((length, _)) = esp::parse_trailer(plain) else { return };
            let Ok(inner) = esp::parse_inner_headers(&plain[..length]) else { return };
            let frame = &plain[inner.frame];
            let headers = black_box(Layout::parse(frame));
            black_box(flow_hash(frame, &headers));
        },
    );
    Ok(())
}

// ---- counting and judging ----

/// Instructions of one call.
#[derive(Clone, Copy)]
struct Count {
    /// Without the AEAD.
    ours: u64,
    /// In the AEAD, and in the wrapper of its library.
    aead: u64,
}

fn judge(update: bool) -> Result<(), Error> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("counts.toml");
    let budgets = if update { Vec::new() } else { read_budgets(&file)? };
    let (mut table, mut over, mut counts) = (String::new(), Vec::new(), Vec::new());
    writeln!(
        table,
        "{:<16} {:<37} {:>9} {:>9} {:>8} {:>10}",
        "function", "one call", "count", "budget", "", "AEAD apart"
    )?;
    for Function { name, call, .. } in &FUNCTIONS {
        let Count { ours, aead } = count(name)?;
        counts.push((*name, ours));
        let budget = budgets.iter().find(|(of, _)| of == name).map(|(_, budget)| *budget);
        if budget.is_none() && !update {
            return Err(format!("{name} has no budget: ./dev counts --update").into());
        }
        let budget = budget.unwrap_or(ours);
        let more = (ours as f64 / budget as f64 - 1.0) * 100.0;
        if more > TOLERANCE_PERCENT {
            over.push(*name);
        }
        writeln!(table, "{name:<16} {call:<37} {ours:>9} {budget:>9} {more:>+6.1} % {aead:>10}")?;
    }
    print!("{table}");
    judge_flat(&counts)?;
    if update {
        let lines: String =
            counts.iter().map(|(name, ours)| format!("{name} = {ours}\n")).collect();
        std::fs::write(&file, format!("{HEAD}{lines}"))?;
        println!("wrote {}", file.display());
    }
    if !cfg!(target_arch = "x86_64") {
        println!("not judged: the budget is that of x86-64");
        return Ok(());
    }
    if over.is_empty() {
        return Ok(());
    }
    Err(format!(
        "over the budget by more than {TOLERANCE_PERCENT} %: {}; make it cheaper, or say in the commit \
         what the instructions buy and run ./dev counts --update",
        over.join(", ")
    )
    .into())
}

/// Much takes about as many instructions as little.
fn judge_flat(counts: &[(&str, u64)]) -> Result<(), Error> {
    let (little, much, percent) = FLAT;
    let of = |name: &str| {
        let found = counts.iter().find(|(of, _)| *of == name).map(|(_, count)| *count as f64);
        found.ok_or_else(|| format!("{name} was not counted"))
    };
    let more = (of(much)? / of(little)? - 1.0) * 100.0;
    println!("{much} takes {more:+.1} % more than {little}");
    if more > percent {
        return Err(format!("{much} may take {percent} % more than {little}").into());
    }
    Ok(())
}

const HEAD: &str = "\
# Instructions that one call of each hot function may take on x86-64, without the AEAD; 3 %
# more are tolerated. Counted by callgrind in the profile `lab`. Written by `./dev counts --update`.

";

fn read_budgets(file: &Path) -> Result<Vec<(String, u64)>, Error> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        format!("{}: {error}; write it by ./dev counts --update", file.display())
    })?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, budget) = line.split_once(" = ").ok_or("a budget is NAME = NUMBER")?;
            Ok((name.to_owned(), budget.parse()?))
        })
        .collect()
}

/// Runs one function under callgrind. The environment is empty, since its size moves the stack.
fn count(name: &str) -> Result<Count, Error> {
    let out = PathBuf::from(format!(
        "{}/weft-counts-{}-{name}",
        std::env::temp_dir().display(),
        std::process::id()
    ));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--compress-strings=no", "--compress-pos=no"])
        .arg(format!("--toggle-collect=*{COUNTED}*"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe()?)
        .args(["run", name])
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        // A function is bound when the program starts, not at its first call.
        .env("LD_BIND_NOW", "1")
        .output()
        .map_err(|error| format!("valgrind: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let text = std::fs::read_to_string(&out)?;
    std::fs::remove_file(&out)?;
    let (all, aead) = totals(&text).ok_or_else(|| format!("{name}: callgrind has no totals"))?;
    if all == 0 {
        return Err(format!("{name}: callgrind has counted nothing").into());
    }
    let ours = all.checked_sub(aead).ok_or("callgrind counts more in a part than in all")?;
    Ok(Count { ours: ours / CALLS, aead: aead / CALLS })
}

/// All instructions, and those spent in calls of the AEAD, of a file of callgrind's
/// (Valgrind manual, "Callgrind Format Specification").
fn totals(text: &str) -> Option<(u64, u64)> {
    let (mut all, mut aead) = (None, 0);
    let (mut enters, mut call) = (false, false);
    for line in text.lines() {
        if let Some(total) = line.strip_prefix("totals: ") {
            all = total.parse().ok();
        } else if let Some(function) = line.strip_prefix("cfn=") {
            enters = AEAD_ENTRIES.iter().any(|entry| function.contains(entry));
        } else if line.starts_with("calls=") {
            call = true;
        } else if std::mem::take(&mut call) && enters {
            // The line behind `calls=`: a position, and the cost of the calls with all below them.
            aead += line.split(' ').nth(1)?.parse::<u64>().ok()?;
        }
    }
    Some((all?, aead))
}
