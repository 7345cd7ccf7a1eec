//! Programs of other projects watch the gateway as they watched the stock server: by the status file and by the
//! management interface. The stock server answers first, and its answers are the measure.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{require, try_wait_until};
use weft_lab::net::gateway::{CONNECTED, Client, LIMIT, Machine};

use crate::pki::Keys;
use crate::stage::{SERVER, Stage};

const HOST: &str = "10.8.0.1";
/// Pings of 1,000 bytes, and what each is on the wire: 28 bytes of headers inside, 24 outside.
const PINGS: u64 = 100;
const PING_BYTES: u64 = 1_000 + 28 + 24;
/// What signs of life add meanwhile.
const LIFE_BYTES: u64 = 4_000;
/// How long a killed session may last.
const KILL_LIMIT: Duration = Duration::from_secs(1);

/// Commands whose answers have the same shape on both, whatever has happened before.
const COMMANDS: [&str; 46] = [
    "status 1",
    "status 2",
    "status 3",
    "status",
    "status 4",
    "status x",
    "state",
    "state 1",
    "state on",
    "state off",
    "state x",
    "log",
    "log x",
    "log on",
    "log off",
    "echo",
    "echo on",
    "echo off",
    "echo all",
    "echo on all",
    "echo x",
    "verb",
    "verb 4",
    "verb 3",
    "verb 99",
    "mute",
    "hold",
    "hold off",
    "hold release",
    "hold x",
    "load-stats",
    "bytecount",
    "bytecount x",
    "bytecount 0",
    "kill",
    "kill nobody",
    "kill 192.0.2.7:5",
    "kill 192.0.2.7:x",
    "kill nowhere:5",
    "client-kill",
    "client-kill 99",
    "client-kill x",
    "remote-entry-count",
    "foo bar",
    "STATUS 2",
    "",
];

fn config() -> String {
    let more = "status-version 2\nmanagement m.sock unix\nclient-to-client\nverify-client-cert require\n\
                route 192.168.7.0 255.255.255.0\n";
    let often = SERVER.replace("status openvpn-status.log", "status openvpn-status.log 1");
    format!("{often}{more}")
}

/// A connection to a management interface.
struct Console {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    /// Notices that came between answers.
    notices: Vec<String>,
}

impl Console {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        stream.set_read_timeout(Some(LIMIT))?;
        let lines = BufReader::new(stream.try_clone()?);
        let mut console = Self { stream, lines, notices: Vec::new() };
        let greeting = console.line()?;
        let expected = ">INFO:OpenVPN Management Interface Version 5 -- type 'help' for more info";
        ensure!(greeting == expected, "{greeting:?}");
        Ok(console)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        ensure!(self.lines.read_line(&mut line)? > 0, "the connection has ended");
        let line = line.strip_suffix("\r\n").context("a line without its end")?;
        Ok(line.to_owned())
    }

    /// The answer to a command, up to that of a second one whose answer is known.
    fn ask(&mut self, command: &str) -> anyhow::Result<Vec<String>> {
        write!(self.stream, "{command}\npid\n")?;
        let mut answer = Vec::new();
        loop {
            let line = self.line()?;
            if line.starts_with("SUCCESS: pid=") {
                return Ok(answer);
            }
            match line.starts_with('>') {
                true => self.notices.push(line),
                false => answer.push(line),
            }
        }
    }

    /// A notice that begins so, once it has come.
    fn notice(&mut self, start: &str) -> anyhow::Result<String> {
        self.notice_with(start, "")
    }

    /// A notice that begins so and has this text, once it has come.
    fn notice_with(&mut self, start: &str, text: &str) -> anyhow::Result<String> {
        loop {
            let is_it = |notice: &String| notice.starts_with(start) && notice.contains(text);
            if let Some(found) = self.notices.iter().position(is_it) {
                return Ok(self.notices.swap_remove(found));
            }
            let line = self.line().with_context(|| format!("no notice {start} {text}"))?;
            self.notices.push(line);
        }
    }

    /// The fields of a client's line in the second format.
    fn client(&mut self, name: &str) -> anyhow::Result<Option<Vec<String>>> {
        let status = self.ask("status 2")?;
        let start = format!("CLIENT_LIST,{name},");
        let line = status.iter().find(|line| line.starts_with(&start));
        Ok(line.map(|line| line.split(',').map(str::to_owned).collect()))
    }

    fn bytes_received(&mut self, name: &str) -> anyhow::Result<u64> {
        let client = self.client(name)?.context("the client is gone")?;
        Ok(client[5].parse()?)
    }
}

/// A line with its numbers left out, and without what names the program.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    for char in line.chars() {
        match char {
            '0'..='9' if shape.ends_with('#') => {}
            '0'..='9' => shape.push('#'),
            char => shape.push(char),
        }
    }
    match ["TITLE,OpenVPN #.#.#", "TITLE\tOpenVPN #.#.#"].iter().find(|it| shape.starts_with(**it))
    {
        Some(title) => (*title).to_owned(),
        None => shape,
    }
}

/// Lines in an order that no table has.
fn shapes(lines: &[String]) -> Vec<String> {
    let mut shapes: Vec<String> = lines.iter().map(|line| shape(line)).collect();
    shapes.sort_unstable();
    shapes
}

/// What both servers say, and how they count.
struct Said {
    answers: Vec<Vec<String>>,
    file: Vec<String>,
    /// Bytes that came from a client that sent its pings.
    counted: u64,
}

fn hear(socket: &Path, file: &Path, alice: &Machine) -> anyhow::Result<Said> {
    let mut console = Console::open(socket)?;
    let mut answers = Vec::new();
    for command in COMMANDS {
        answers.push(shapes(&console.ask(command)?));
    }
    let count = PINGS.to_string();
    let before = console.bytes_received("alice")?;
    let pings = ["ping", "-n", "-q", "-c", &count, "-i", "0.01", "-s", "1000", HOST];
    alice.netns.exec(&pings)?.success()?;
    let counted = console.bytes_received("alice")? - before;
    let has_both = |text: &str| text.contains(",alice,") && text.contains(",bob,");
    let text = || std::fs::read_to_string(file).unwrap_or_default();
    try_wait_until("the status file to name both clients", LIMIT, || Ok(has_both(&text())))?;
    let lines: Vec<String> = text().lines().map(str::to_owned).collect();
    ensure!(std::fs::metadata(file)?.permissions().mode() & 0o777 == 0o600);
    Ok(Said { answers, file: shapes(&lines), counted })
}

/// Ends the sessions of a client in each way; it comes back after each, but for the last.
fn kill(socket: &Path, alice: &mut Client) -> anyhow::Result<Vec<Duration>> {
    let mut console = Console::open(socket)?;
    let mut back = Vec::new();
    for way in ["kill alice", "kill PLACE", "client-kill NUMBER"] {
        let client = console.client("alice")?.context("alice is not there")?;
        let command = way.replace("PLACE", &client[2]).replace("NUMBER", &client[10]);
        let begun = Instant::now();
        let answer = console.ask(&command)?;
        let expected = match way {
            "kill alice" => "SUCCESS: common name 'alice' found, 1 client(s) killed".to_owned(),
            "kill PLACE" => format!("SUCCESS: 1 client(s) at address {} killed", client[2]),
            _ => "SUCCESS: client-kill command succeeded".to_owned(),
        };
        ensure!(answer == [expected], "{way}: {answer:?}");
        alice.process.line_with(CONNECTED, LIMIT)?;
        back.push(begun.elapsed());
        let established = console.notice(">CLIENT:ESTABLISHED,")?;
        console.notice(">CLIENT:ENV,common_name=alice")?;
        let now = console.client("alice")?.context("alice is not back")?;
        ensure!(established.ends_with(&format!(",{}", now[10])), "{established}: {now:?}");
        ensure!(now[10] != client[10] && now[2] != client[2], "{client:?}: {now:?}");
        console.notices.clear();
    }
    let client = console.client("alice")?.context("alice is not there")?;
    console.ask(&format!("client-kill {} \"HALT,bye bye\"", client[10]))?;
    alice.process.line_with("bye bye", LIMIT)?;
    alice.process.wait(LIMIT)?;
    Ok(back)
}

#[test]
fn programs_watch_the_gateway_as_they_watched_the_stock_server() -> anyhow::Result<()> {
    require("socat", "socat")?;
    let stage = Stage::new(Keys::Ecdsa)?;
    stage.write("ccd/alice", "iroute 192.168.7.0 255.255.255.0\n")?;
    let (alice, bob) = (stage.profile("alice", "")?, stage.profile("bob", "")?);
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);

    let mut server = stage.stock(&config())?;
    let (socket, file) = (stage.folder.join("m.sock"), stage.folder.join("openvpn-status.log"));
    let (mut first, second) = (one.connect(&alice)?, two.connect(&bob)?);
    one.wait_ping(HOST.parse::<std::net::IpAddr>()?)?;
    let stock = hear(&socket, &file, &one)?;
    let stock_back = kill(&socket, &mut first)?;
    drop(second);
    server.terminate(LIMIT)?;

    let report = stage.imported(&config(), &[])?;
    let lines = report["lines"].as_array().context("no lines")?;
    for text in ["status openvpn-status.log 1", "status-version 2", "management m.sock unix"] {
        let line = lines.iter().find(|line| line["text"] == text).context(text)?;
        ensure!(line["verdict"] == "taken", "{line}");
    }
    let served = stage.serve(&[])?;
    let path = |name: &str| PathBuf::from(served[name].as_str().unwrap_or_default());
    let (socket, file) = (path("management"), path("status_file"));
    ensure!(std::fs::metadata(&socket)?.permissions().mode() & 0o777 == 0o600);
    let (mut first, second) = (one.connect(&alice)?, two.connect(&bob)?);
    one.wait_ping(HOST.parse::<std::net::IpAddr>()?)?;
    let ours = hear(&socket, &file, &one)?;
    let both = COMMANDS.iter().zip(&stock.answers).zip(&ours.answers);
    let others: Vec<_> = both.filter(|((_, stock), ours)| stock != ours).collect();
    ensure!(others.is_empty(), "the stock server's answers, then Weft's: {others:#?}");
    ensure!(stock.file == ours.file, "{:#?}, Weft {:#?}", stock.file, ours.file);
    for counted in [stock.counted, ours.counted] {
        let sent = PINGS * PING_BYTES;
        ensure!((sent..sent + LIFE_BYTES).contains(&counted), "{counted} bytes of {sent}");
    }
    note(&format!("bytes counted: stock {}, Weft {}", stock.counted, ours.counted));
    let back = kill(&socket, &mut first)?;
    note(&format!("back after a kill: stock {stock_back:?}, Weft {back:?}"));
    watch(&stage, &socket, &one, &alice)?;
    drop(second);
    stage.host().weft(&["openvpn", "stop"])?.success()?;
    ensure!(!socket.exists() && !file.exists(), "files stay behind");
    Ok(())
}

/// Notices of a client that comes and is killed, and a program that is no test.
fn watch(stage: &Stage, socket: &Path, one: &Machine, alice: &Path) -> anyhow::Result<()> {
    let (mut console, mut other) = (Console::open(socket)?, Console::open(socket)?);
    for command in ["log on", "state on", "bytecount 1"] {
        let answer = console.ask(command)?;
        ensure!(answer.len() == 1 && answer[0].starts_with("SUCCESS: "), "{command}: {answer:?}");
    }
    let client = one.connect(alice)?;
    let notice = console.notice_with(">LOG:", "is connected")?;
    ensure!(notice.contains(",I,alice/198.51.1.2:"), "{notice}");
    let number = other.client("alice")?.context("alice is not there")?[10].clone();
    console.notice(&format!(">BYTECOUNT_CLI:{number},"))?;
    other.ask("kill alice")?;
    let begun = Instant::now();
    console.notice_with(">LOG:", "is gone: the administrator has ended its session")?;
    try_wait_until("the session to end", KILL_LIMIT, || {
        let client = other.client("alice");
        Ok(client.is_ok_and(|client| client.is_none_or(|client| client[10] != number)))
    })?;
    note(&format!("killed after {:?}", begun.elapsed()));
    // Another program, in the host's own words.
    let command =
        format!("printf 'load-stats\\nquit\\n' | socat -t 20 - UNIX-CONNECT:{}", socket.display());
    let said = stage.host().netns().exec(&["sh", "-c", &command])?.success()?.stdout;
    let totals = said.lines().find(|line| line.starts_with("SUCCESS: nclients="));
    let totals = totals.with_context(|| said.clone())?;
    let received = totals.split("bytesin=").nth(1).and_then(|it| it.split(',').next());
    let received: u64 = received.context("no bytes")?.parse()?;
    // Those of the sessions that were killed are among them.
    ensure!(received > PINGS * PING_BYTES, "{totals}");
    drop(client);
    Ok(())
}
