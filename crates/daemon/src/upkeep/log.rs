//! The log of a daemon. For any input of peers, its lines are harmless to a terminal, limited in number, and in
//! a bounded file.
//!
//! Lines have one cause if one place in the code writes them. Each cause has a burst limit and a limit per
//! minute. Its next line is preceded by the number of lines left out.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tracing::{Event, Level, Subscriber, callsite};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{self, Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// The log of a daemon that runs detached.
pub(crate) const LOG: &str = "weft.log";
/// A log file is rotated at this size.
const LOG_BYTES_MAX: u64 = 8 << 20;
/// Burst limit: lines of one cause at once.
const LINES_AT_ONCE_MAX: u32 = 300;
/// Lines of one cause a minute, once the burst is used up.
const LINES_PER_MINUTE: u32 = 30;
/// Bytes of a value that a line shows.
const VALUE_BYTES_MAX: usize = 1024;

/// Sends log lines to standard error. `WEFT_LOG` sets the filter: `info` unless set.
pub fn log_to_stderr() {
    let ansi = io::IsTerminal::is_terminal(&io::stderr());
    begin(io::stderr, ansi);
}

/// Sends log lines to standard error, and bounds the file at `path` if standard error is that file. `WEFT_LOG`
/// sets the filter: `info` unless set.
pub fn log_to_file(path: PathBuf) {
    let file = is_stderr(&path).then(|| LogFile::open(path, LOG_BYTES_MAX, true));
    match file {
        Some(Ok(file)) => begin(file, false),
        Some(Err(_)) | None => log_to_stderr(),
    }
}

fn is_stderr(path: &Path) -> bool {
    let (Ok(stderr), Ok(file)) = (rustix::fs::fstat(io::stderr()), rustix::fs::stat(path)) else {
        return false;
    };
    (stderr.st_dev, stderr.st_ino) == (file.st_dev, file.st_ino)
}

fn begin<W>(writer: W, ansi: bool)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_from_env("WEFT_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let fields = format::debug_fn(|writer, field, value| match field.name() {
        "message" => write!(writer, "{}", harmless(value)),
        name => write!(writer, "{name}={}", harmless(value)),
    });
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(ansi)
        .fmt_fields(fields.delimited(" "))
        .event_format(Bounded::default())
        .try_init();
}

/// Escapes control characters in a value, and those that change the text direction.
fn harmless(value: &dyn fmt::Debug) -> String {
    let text = format!("{value:?}");
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if out.len() >= VALUE_BYTES_MAX {
            out.push('…');
            break;
        }
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || turns {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// Writes lines in the usual format, within the quota of each cause.
#[derive(Default)]
struct Bounded {
    format: Format,
    causes: Mutex<HashMap<callsite::Identifier, Quota>>,
}

impl<S, N> FormatEvent<S, N> for Bounded
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        // Levels beyond `info` are not limited: a user who asks for them wants every line.
        if *metadata.level() <= Level::INFO {
            let now = Instant::now();
            let mut causes = self.causes.lock().unwrap_or_else(PoisonError::into_inner);
            let quota = causes.entry(metadata.callsite()).or_insert_with(|| Quota::new(now));
            let Some(left_out) = quota.take(now) else { return Ok(()) };
            drop(causes);
            if left_out > 0 {
                writeln!(writer, "omitted {left_out} lines like the next one")?;
            }
        }
        self.format.format_event(context, writer, event)
    }
}

/// The lines that a cause may still write.
struct Quota {
    lines: f64,
    at: Instant,
    left_out: u64,
}

impl Quota {
    fn new(now: Instant) -> Self {
        Self { lines: LINES_AT_ONCE_MAX.into(), at: now, left_out: 0 }
    }

    /// Takes a line. Returns how many were left out before it; `None` if this one is left out.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let since = now.saturating_duration_since(self.at);
        let more = since.as_secs_f64() * f64::from(LINES_PER_MINUTE) / 60.0;
        (self.lines, self.at) = ((self.lines + more).min(LINES_AT_ONCE_MAX.into()), now);
        if self.lines < 1.0 {
            self.left_out += 1;
            return None;
        }
        self.lines -= 1.0;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// A log file that rotates when it is full. Write errors are ignored: a full disk stops nothing.
struct LogFile {
    path: PathBuf,
    bytes_max: u64,
    /// This file is also standard error: panic messages continue in the new file.
    is_stderr: bool,
    file: Mutex<File>,
}

impl LogFile {
    fn open(path: PathBuf, bytes_max: u64, is_stderr: bool) -> io::Result<Self> {
        let file = Mutex::new(append(&path)?);
        Ok(Self { path, bytes_max, is_stderr, file })
    }

    fn write_line(&self, line: &[u8]) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        if len > 0 && len + line.len() as u64 > self.bytes_max {
            self.move_aside(&mut file);
        }
        let _ = file.write_all(line);
    }

    fn move_aside(&self, file: &mut File) {
        let moved = std::fs::rename(&self.path, old(&self.path));
        match moved.and_then(|()| append(&self.path)) {
            Ok(new) => {
                if self.is_stderr {
                    let _ = rustix::stdio::dup2_stderr(&new);
                }
                *file = new;
            }
            // The file must not grow in any case.
            Err(_) => drop(file.set_len(0)),
        }
    }
}

/// The rotated log: that of the previous run, or the older half of this one.
pub(crate) fn old(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Opens a log file that no other user can read.
pub(crate) fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

impl<'a> MakeWriter<'a> for LogFile {
    type Writer = LogWriter<'a>;

    fn make_writer(&'a self) -> LogWriter<'a> {
        LogWriter(self)
    }
}

/// Writes one line at a time.
struct LogWriter<'a>(&'a LogFile);

impl Write for LogWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.write_line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    const OLD_LOG: &str = "weft.log.1";

    #[test]
    fn nothing_from_outside_reaches_a_terminal_as_it_is_or_at_any_length() {
        let text = "a\u{1b}[31m\r\nb\u{9b}\u{202e}c";
        let shown = harmless(&format_args!("{text}"));
        assert_eq!(shown, "a\\u{1b}[31m\\u{d}\\u{a}b\\u{9b}\\u{202e}c");
        assert!(harmless(&"ä".repeat(9_999)).len() < VALUE_BYTES_MAX + 9);
    }

    #[test]
    fn a_cause_has_some_lines_at_once_and_a_few_a_minute_and_says_how_many_were_left_out() {
        let begin = Instant::now();
        let mut quota = Quota::new(begin);
        let written = (0..10_000).filter(|_| quota.take(begin).is_some()).count();
        assert_eq!(written, LINES_AT_ONCE_MAX as usize);
        let minute = begin + Duration::from_secs(60);
        let mut told = Vec::new();
        told.extend((0..10_000).filter_map(|_| quota.take(minute)));
        assert_eq!(told.len(), LINES_PER_MINUTE as usize);
        assert_eq!((told[0], told[1]), (10_000 - u64::from(LINES_AT_ONCE_MAX), 0));
    }

    #[test]
    fn a_log_file_is_bounded_and_its_older_half_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOG);
        let log = LogFile::open(path.clone(), 1_000, false).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        let mut all = String::new();
        for number in 0..12 {
            let line = format!("{number:099}\n");
            log.make_writer().write_all(line.as_bytes()).unwrap();
            all.push_str(&line);
        }
        assert_eq!(read(OLD_LOG) + &read(LOG), all);
        for _ in 0..10_000 {
            log.make_writer().write_all(&[b'x'; 100]).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= 1_000);
        }
        assert!(read(OLD_LOG).len() <= 1_000);
        // Even if the file cannot be renamed, it stays bounded.
        std::fs::remove_file(dir.path().join(OLD_LOG)).unwrap();
        std::fs::create_dir(dir.path().join(OLD_LOG)).unwrap();
        for _ in 0..100 {
            log.make_writer().write_all(&[b'x'; 100]).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= 1_000);
        }
    }

    /// As the daemon's, with a writer of the test's.
    #[test]
    fn lines_go_through_all_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogFile::open(dir.path().join(LOG), LOG_BYTES_MAX, false).unwrap();
        let fields = format::debug_fn(|writer, field, value| match field.name() {
            "message" => write!(writer, "{}", harmless(value)),
            name => write!(writer, "{name}={}", harmless(value)),
        });
        let subscriber = tracing_subscriber::fmt()
            .with_writer(log)
            .with_ansi(false)
            .fmt_fields(fields.delimited(" "))
            .event_format(Bounded::default())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..1_000 {
                let reason = format!("{number}\u{1b}[2J\n1970 forged line");
                tracing::warn!(%reason, number, "host refused");
                tracing::info!("of another cause {number}");
            }
        });
        let text = std::fs::read_to_string(dir.path().join(LOG)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let lines_of = |cause: &str| lines.iter().filter(|line| line.contains(cause)).count();
        for cause in ["host refused", "of another cause"] {
            let some = LINES_AT_ONCE_MAX as usize..(LINES_AT_ONCE_MAX + LINES_PER_MINUTE) as usize;
            assert!(some.contains(&lines_of(cause)), "{cause}: {text}");
        }
        assert!(lines[0].contains("WARN") && lines[0].ends_with("number=0"), "{text}");
        assert!(lines[0].contains("host refused reason=0\\u{1b}[2J\\u{a}1970 forged"), "{text}");
    }
}
