//! One guest: booted with a job, listened to until the job has ended, then ended itself.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::image::{self, Additions};
use super::kernel::Kernel;
use super::shell::quoted;
use super::{interrupt, make_directory, run, scratch, tools};

/// The path of Weft's program in a guest.
const WEFT_IN_GUEST: &str = "/usr/local/bin/weft";
/// For the kernel: its log goes to the second serial line; a panic ends the guest. An emulated clock that a
/// busy machine holds up gives no reason to doubt it, to complain or to give up. Programs start at fixed
/// addresses, since QEMU caches translated code by address. With random addresses it translates each program
/// again at each start, five times slower.
const KERNEL_ARGUMENTS: &str = "console=ttyS1 loglevel=4 panic=-1 oops=panic mitigations=off norandmaps \
    random.trust_cpu=on tsc=reliable no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1 rcupdate.rcu_expedited=1";
/// QEMU's processor without the two flags for which kernel and C library copy and clear by `rep movsb` and `rep
/// stosb`. Emulated, those go byte by byte, and a guest takes a tenth longer.
const PROCESSOR: &str = "max,-erms,-fsrm";
/// The time of an instruction in a guest whose clock counts them, as a power of two in nanoseconds. It is 2 ns,
/// about the speed of emulation. A faster guest sends more in each second that a test waits for. A slower one
/// spends more of its instructions on the passing of time alone.
const INSTRUCTION_SHIFT: u32 = 1;
/// QEMU's device for tests, by which a program in the guest writes to any place in the kernel's memory.
const COPIER: &str = "edu,dma_mask=0xffffffffffffffff";
/// The size of the disk that files come back on; it takes no room until it is written.
const OUTBOX_BYTES: u64 = 4 << 30;
/// How often a waiting host looks for Ctrl-C and the time limit.
const POLL_INTERVAL_MS: u64 = 50;
/// How much output may wait in memory, in reads.
const OUTPUT_READS_MAX: usize = 64;
/// The bytes of one read of the guest's output.
const OUTPUT_READ_BYTES: usize = 64 * 1024;
/// How long a guest waits for its host to end it.
const LINGER_S: u32 = 20;
/// How long a guest of a shell waits, so that its last words reach QEMU.
const SHELL_LINGER_S: u32 = 1;
/// The unit of processor time in `/proc` on Linux.
const TICK_MS: u64 = 10;
/// How many lines of the kernel's log an error shows.
const LOG_LINES_SHOWN: usize = 20;

/// The source of a guest's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Clock {
    /// This machine's clock: times are real, and a busy machine holds a guest up.
    Host,
    /// The instructions that the guest has run, with every wait of an idle guest skipped. A busy or slow machine
    /// only makes it take longer; the guest does not notice.
    Instructions,
}

impl Clock {
    /// The cores of a guest. With instructions counted, QEMU runs one core for long before the other. A core that
    /// waits by spinning for the other spins for all that time.
    const fn cores(self) -> u32 {
        match self {
            Self::Host => 2,
            Self::Instructions => 1,
        }
    }
}

/// The work of a guest.
#[derive(Debug, Clone)]
pub struct Job {
    /// A script for bash, run as root in `/root`.
    pub script: String,
    /// Files and folders of this machine, and their places in the guest.
    pub files: Vec<(PathBuf, PathBuf)>,
    /// The `weft` program, for the guest's path.
    pub weft: Option<PathBuf>,
    /// Environment variables of the script.
    pub environment: Vec<(String, String)>,
    /// The guest's memory in MiB. Its files stand in it too.
    pub memory_mib: u32,
    /// The source of its time.
    pub clock: Clock,
    /// Further words for its kernel, such as `ipv6.disable=1`.
    pub boot: String,
    /// The longest that the guest may take, boot included.
    pub limit: Duration,
    /// The destination of files that the script writes under `/out`; without it they are lost.
    pub out: Option<PathBuf>,
    /// The destination of the kernel's log; without it an error shows the log's end, and the log is removed.
    pub log: Option<PathBuf>,
}

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ending {
    /// The script's exit code.
    pub code: i32,
    /// From QEMU's start to the end of the script.
    pub elapsed: Duration,
    /// The processor time of QEMU, which a busy machine changes little.
    pub processor: Duration,
}

/// A machine that is ready to boot.
#[derive(Debug)]
pub struct Guest<'a> {
    kernel: &'a Kernel,
    job: &'a Job,
    token: String,
    place: tempfile::TempDir,
}

impl<'a> Guest<'a> {
    /// A guest with this kernel for this job.
    ///
    /// # Errors
    /// No temporary folder can be made.
    pub fn new(kernel: &'a Kernel, job: &'a Job) -> anyhow::Result<Self> {
        let token = format!("weft-guest-{:032x}", rand::random::<u128>());
        Ok(Self { kernel, job, token, place: scratch()? })
    }

    /// Boots the guest, hands its output to `sink` as it comes, and gives how the script ended.
    ///
    /// # Errors
    /// The guest cannot be made, crashed, or took longer than the job's limit; or
    /// [`interrupt::Interrupted`]. The guest has ended in every case.
    pub fn run(&self, sink: &mut dyn FnMut(&[u8])) -> anyhow::Result<Ending> {
        let mut command = self.qemu("run", LINGER_S)?;
        command.args(["-serial", "null", "-serial", &self.log_argument()]);
        command.args(["-chardev", "stdio,id=output,signal=off"]);
        // QEMU takes the end of its input for the end of the port, so the input is a pipe that stays.
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl-C is for this program, which then ends the guest.
        command.process_group(0);
        let mut machine = Machine::start(command)?;
        let (sender, output) = sync_channel(OUTPUT_READS_MAX);
        let mut pipe = machine.0.stdout.take().context("no pipe from QEMU")?;
        let reader = std::thread::spawn(move || read_into(&mut pipe, &sender));
        let start = Instant::now();
        let code = self.listen(&output, start, sink);
        let processor = machine.processor_time();
        drop(machine);
        drop(output);
        let _ = reader.join();
        let ending = Ending { code: code?, elapsed: start.elapsed(), processor };
        self.take_files()?;
        Ok(ending)
    }

    /// Boots the guest with a terminal, where the script's input and output are this program's, and gives
    /// the script's exit code.
    ///
    /// # Errors
    /// As [`Guest::run`].
    pub fn interact(&self) -> anyhow::Result<i32> {
        let mut command = self.qemu("shell", SHELL_LINGER_S)?;
        let end = self.place.path().join("end");
        command.args(["-chardev", "stdio,id=terminal,signal=off", "-serial", "chardev:terminal"]);
        command.args(["-serial", &self.log_argument()]);
        command.args(["-chardev", &format!("file,id=output,path={}", end.display())]);
        let mut machine = Machine::start(command)?;
        machine.0.wait()?;
        let mut watch = EndWatch::new(&self.token);
        watch.feed(&std::fs::read(&end).unwrap_or_default());
        let code = watch.code.with_context(|| self.crash())?;
        self.take_files()?;
        Ok(code)
    }

    /// QEMU's command line without serial lines and the port's other end.
    fn qemu(&self, mode: &str, linger_s: u32) -> anyhow::Result<Command> {
        let mut command = Command::new("setpriv");
        // The guest ends with this program, however that ends.
        command.args(["--pdeathsig", "KILL", "qemu-system-x86_64"]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        // With a thread for each core, a core may run an instruction that another has just patched. Then the
        // guest's kernel dies (an int3 where a static key was switched).
        command.args(["-accel", "tcg,thread=single", "-cpu", PROCESSOR]);
        if self.job.clock == Clock::Instructions {
            command.args(["-icount", &format!("shift={INSTRUCTION_SHIFT},sleep=off")]);
            command.args(["-rtc", "clock=vm"]);
        }
        command.args(["-smp", &self.job.clock.cores().to_string()]);
        command.args(["-m", &format!("{}M", self.job.memory_mib)]);
        command.arg("-kernel").arg(self.kernel.image()?);
        command.arg("-initrd").arg(self.initrd(mode, linger_s)?);
        command.args(["-append", &format!("{KERNEL_ARGUMENTS} {}", self.job.boot)]);
        command.args(["-device", "virtio-serial-pci"]);
        command.args(["-device", "virtserialport,chardev=output,name=weft.output"]);
        command.args(["-device", COPIER]);
        if let Some(tools) = tools::disk()? {
            let options = "if=none,id=tools,format=raw,readonly=on";
            command.args(["-drive", &format!("{options},file={}", tools.display())]);
            command.args(["-device", "virtio-blk-pci,drive=tools,serial=tools"]);
        }
        if self.job.out.is_some() {
            let outbox = self.outbox();
            std::fs::File::create(&outbox)?.set_len(OUTBOX_BYTES)?;
            let drive =
                format!("if=none,id=outbox,format=raw,cache=unsafe,file={}", outbox.display());
            command.args([
                "-drive",
                &drive,
                "-device",
                "virtio-blk-pci,drive=outbox,serial=outbox",
            ]);
        }
        Ok(command)
    }

    fn initrd(&self, mode: &str, linger_s: u32) -> anyhow::Result<PathBuf> {
        let base = image::base(self.kernel)?;
        let more = self.place.path().join("more.cpio");
        let mut additions = Additions { files: self.job.files.clone(), texts: Vec::new() };
        let mut variables = self.job.environment.clone();
        if let Some(weft) = &self.job.weft {
            additions.files.push((weft.clone(), WEFT_IN_GUEST.into()));
            variables.push(("WEFT_BIN".to_owned(), WEFT_IN_GUEST.to_owned()));
            // The benchmark's program is looked for beside it.
            let bench = weft.with_file_name("weft-bench");
            if bench.is_file() {
                additions
                    .files
                    .push((bench, Path::new(WEFT_IN_GUEST).with_file_name("weft-bench")));
            }
        }
        let mut settings = format!("TOKEN={}\nMODE={mode}\nLINGER_S={linger_s}\n", self.token);
        let (rows, columns) = terminal_size();
        settings.push_str(&format!("ROWS={rows}\nCOLUMNS_WIDE={columns}\n"));
        for (name, value) in variables {
            settings.push_str(&format!("export {name}={}\n", quoted(&value)));
        }
        additions.texts.push(("vm/settings".into(), settings));
        additions.texts.push(("vm/job".into(), format!("{}\n", self.job.script)));
        image::additions(&additions, &more)?;
        let initrd = self.place.path().join("initrd");
        let mut joined = std::fs::File::create(&initrd)?;
        for part in [&base, &more] {
            std::io::copy(&mut std::fs::File::open(part)?, &mut joined)?;
        }
        Ok(initrd)
    }

    fn listen(
        &self,
        output: &Receiver<Vec<u8>>,
        start: Instant,
        sink: &mut dyn FnMut(&[u8]),
    ) -> anyhow::Result<i32> {
        let mut watch = EndWatch::new(&self.token);
        loop {
            interrupt::check()?;
            match output.recv_timeout(Duration::from_millis(POLL_INTERVAL_MS)) {
                Ok(bytes) => sink(&watch.feed(&bytes)),
                Err(RecvTimeoutError::Timeout) => sink(&watch.flush()),
                Err(RecvTimeoutError::Disconnected) => bail!(self.crash()),
            }
            if let Some(code) = watch.code {
                return Ok(code);
            }
            if start.elapsed() >= self.job.limit {
                let limit = self.job.limit.as_secs();
                bail!("the guest was ended at its time limit of {limit} s; {}", self.log_end());
            }
        }
    }

    fn crash(&self) -> String {
        format!("the guest ended before its job did; {}", self.log_end())
    }

    fn log_end(&self) -> String {
        let log = std::fs::read(self.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).replace('\r', "");
        format!("its kernel's log:\n{}", telling_lines(&log))
    }

    fn take_files(&self) -> anyhow::Result<()> {
        let Some(out) = &self.job.out else { return Ok(()) };
        make_directory(out)?;
        let outbox = self.outbox();
        let mut first = [0];
        std::fs::File::open(&outbox)?.read_exact(&mut first)?;
        // A disk that was never written holds no archive.
        if first != [0] {
            let mut tar = Command::new("tar");
            run(tar.arg("--no-same-owner").arg("-C").arg(out).arg("-xf").arg(outbox))?;
        }
        Ok(())
    }

    fn outbox(&self) -> PathBuf {
        self.place.path().join("outbox")
    }

    fn log(&self) -> PathBuf {
        self.job.log.clone().unwrap_or_else(|| self.place.path().join("log"))
    }

    fn log_argument(&self) -> String {
        format!("file:{}", self.log().display())
    }
}

/// A running QEMU; killed when dropped.
struct Machine(Child);

impl Machine {
    fn start(mut command: Command) -> anyhow::Result<Self> {
        Ok(Self(
            command.spawn().context("cannot start setpriv (util-linux) with qemu-system-x86_64")?,
        ))
    }

    /// The processor time taken so far (proc(5), stat, fields 14 and 15).
    fn processor_time(&self) -> Duration {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap_or_default();
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
        let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * TICK_MS)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Finds the words by which a guest says that its job has ended, in output that comes in pieces.
struct EndWatch {
    token: Vec<u8>,
    held: Vec<u8>,
    code: Option<i32>,
}

impl EndWatch {
    fn new(token: &str) -> Self {
        Self { token: token.as_bytes().to_owned(), held: Vec::new(), code: None }
    }

    /// Takes more output and gives what of it is the job's.
    fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(bytes);
        let found = self.held.windows(self.token.len()).position(|window| window == self.token);
        let Some(at) = found else {
            // The last bytes may be the beginning of the token.
            let safe = self.held.len().saturating_sub(self.token.len());
            return self.held.drain(..safe).collect();
        };
        let rest = String::from_utf8_lossy(&self.held[at + self.token.len()..]).into_owned();
        if let Some((code, _)) = rest.split_once('\n') {
            self.code = Some(code.trim().parse().unwrap_or(-1));
        }
        self.held.drain(..at).collect()
    }

    /// Gives what was held back without need: nothing of it begins the token.
    fn flush(&mut self) -> Vec<u8> {
        let begins = |at: &usize| {
            self.token.starts_with(&self.held[*at..]) || self.held[*at..].starts_with(&self.token)
        };
        let keep = (0..self.held.len()).find(begins).unwrap_or(self.held.len());
        self.held.drain(..keep).collect()
    }
}

/// The lines of a kernel's log that tell why it died, or else the last ones.
fn telling_lines(log: &str) -> String {
    const DEATHS: [&str; 3] = ["Kernel panic", "BUG:", "Oops"];
    let lines: Vec<&str> = log.lines().collect();
    let death = lines.iter().position(|line| DEATHS.iter().any(|word| line.contains(word)));
    let from = death.unwrap_or(lines.len().saturating_sub(LOG_LINES_SHOWN));
    let to = lines.len().min(from + LOG_LINES_SHOWN);
    lines[from..to].join("\n")
}

fn read_into(pipe: &mut impl Read, output: &SyncSender<Vec<u8>>) {
    let mut buffer = vec![0; OUTPUT_READ_BYTES];
    while let Ok(count) = pipe.read(&mut buffer) {
        if count == 0 || output.send(buffer[..count].to_vec()).is_err() {
            return;
        }
    }
}

fn terminal_size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => (size.ws_row, size.ws_col),
        _ => (24, 80),
    }
}

/// The default place in the guest of a file of this machine: at `/`, under the same name.
///
/// # Errors
/// It is not there, or has no name.
pub fn place_of(file: &Path) -> anyhow::Result<PathBuf> {
    let file = file.canonicalize().with_context(|| format!("cannot find {}", file.display()))?;
    let name: OsString = file.file_name().context("/ cannot be brought into a guest")?.to_owned();
    Ok(Path::new("/").join(name))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn heard(pieces: &[&str]) -> (String, Option<i32>) {
        let mut watch = EndWatch::new("weft-guest-77");
        let mut text = Vec::new();
        for piece in pieces {
            text.extend(watch.feed(piece.as_bytes()));
            text.extend(watch.flush());
        }
        (String::from_utf8(text).unwrap(), watch.code)
    }

    #[test]
    fn the_end_is_found_however_the_output_is_cut() {
        let whole = "a line\nno newline at its end: weft-guest-77 42\n";
        for first in 0..whole.len() {
            for second in first..whole.len() {
                let pieces = [&whole[..first], &whole[first..second], &whole[second..]];
                let (text, code) = heard(&pieces);
                assert_eq!(
                    (text.as_str(), code),
                    ("a line\nno newline at its end: ", Some(42)),
                    "{pieces:?}"
                );
            }
        }
    }

    #[test]
    fn output_that_only_looks_like_the_end_comes_through() {
        assert_eq!(
            heard(&["weft-guest-7", "8 0\nweft-", "x"]),
            ("weft-guest-78 0\nweft-x".to_owned(), None)
        );
    }

    #[test]
    fn a_death_is_shown_from_its_beginning_and_no_death_by_the_end() {
        let after: String = (0..50).map(|n| format!("trace {n}\n")).collect();
        let text = telling_lines(&format!("calm\nKernel panic - not syncing\n{after}"));
        assert!(text.starts_with("Kernel panic") && text.ends_with("trace 18"), "{text}");
        assert!(telling_lines(&after).starts_with("trace 30"));
        assert_eq!(telling_lines(""), "");
    }

    #[test]
    fn output_without_a_newline_is_not_held_back() {
        assert_eq!(heard(&["a prompt> "]), ("a prompt> ".to_owned(), None));
    }
}
