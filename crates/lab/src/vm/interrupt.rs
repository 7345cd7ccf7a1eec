//! Ctrl-C and other signals to end: noted here and checked by every wait, so that everything is cleaned up.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// How long the thread that listens for signals may take to start.
const READY_TIMEOUT_S: u64 = 5;

static CODE: AtomicI32 = AtomicI32::new(0);
static LISTENING: OnceLock<()> = OnceLock::new();

/// The exit code that an interrupt asks for: 128 and the signal's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted(pub i32);

/// Notes SIGINT, SIGTERM and SIGHUP instead of ending; a second one ends the program at once.
pub fn watch() {
    LISTENING.get_or_init(|| {
        let (ready, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            if let Ok(runtime) = runtime {
                runtime.block_on(listen(&ready));
            }
        });
        let _ = wait.recv_timeout(Duration::from_secs(READY_TIMEOUT_S));
    });
}

/// Whether the program was told to end.
///
/// # Errors
/// [`Interrupted`] if so.
pub fn check() -> Result<(), Interrupted> {
    match CODE.load(Ordering::SeqCst) {
        0 => Ok(()),
        code => Err(Interrupted(code)),
    }
}

async fn listen(ready: &std::sync::mpsc::Sender<()>) {
    use tokio::signal::unix::{SignalKind, signal};
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let [Ok(mut interrupt), Ok(mut terminate), Ok(mut hangup)] = kinds.map(signal) else { return };
    let _ = ready.send(());
    loop {
        let code = tokio::select! {
            _ = interrupt.recv() => 130,
            _ = terminate.recv() => 143,
            _ = hangup.recv() => 129,
        };
        if CODE.swap(code, Ordering::SeqCst) != 0 {
            std::process::exit(code);
        }
    }
}
