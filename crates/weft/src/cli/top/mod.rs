//! `weft top`: current traffic by peer, container and worker, and drops by reason.

mod rates;
mod view;

use std::io::{self, IsTerminal, Write};

use rustix::termios::tcgetwinsize;
use weft_api::call;
use weft_api::{Client, Traffic};

use super::args::TopArgs;
use rates::Rates;

pub(super) async fn top(args: TopArgs, daemon: &Client) -> anyhow::Result<()> {
    let mut before: Traffic = daemon.ask::<call::Traffic>().await?;
    let mut screen = Screen::default();
    let mut ticks = tokio::time::interval(args.interval);
    // Ticks may be late: rates use the time that really passed.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut shown = 0;
    while args.count.is_none_or(|count| shown < count) {
        ticks.tick().await;
        let now: Traffic = daemon.ask::<call::Traffic>().await?;
        let rates = Rates::between(&before, &now);
        let written = if args.json {
            serde_json::to_string(&rates).map(|line| writeln!(io::stdout().lock(), "{line}"))?
        } else {
            screen.show(&view::text(&rates))
        };
        match written {
            // The reader has closed the pipe.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
        before = now;
        shown += 1;
    }
    Ok(())
}

/// Standard output: on a terminal each table replaces the previous one.
#[derive(Default)]
struct Screen {
    drawn: bool,
}

impl Screen {
    fn show(&mut self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if out.is_terminal() {
            write!(out, "{}", view::frame(text, size(&out), self.drawn))?;
            self.drawn = true;
        } else {
            writeln!(out, "{text}")?;
        }
        out.flush()
    }
}

/// Rows and columns of a terminal; unlimited if it does not report them.
fn size(terminal: &io::StdoutLock<'_>) -> (usize, usize) {
    let known = |n: u16| if n == 0 { usize::MAX } else { n.into() };
    tcgetwinsize(terminal)
        .map_or((usize::MAX, usize::MAX), |size| (known(size.ws_row), known(size.ws_col)))
}
