//! Answers of the kernel that come late, for tests: another program may hold its configuration lock for seconds.

use std::time::Duration;

/// Waits before an answer is read, in builds where a test can ask for that.
pub(crate) async fn answer() {
    if let Some(ms) = weft_io::faults::asked("netlink-answer-ms").and_then(|ms| ms.parse().ok()) {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}
