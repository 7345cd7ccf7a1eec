//! Control messages and pushed options. Input: the plaintext of a TLS session behind key method 2.

use weft_openvpn::messages::{
    Message, MessageReader, PasswordForm, PendingStep, PushCollector, PushOption, PushUpdateOption,
};

/// What is read is written with the same meaning.
pub fn run(data: &[u8]) {
    let Ok(messages) = MessageReader::default().handle_bytes(data) else { return };
    let mut collector = PushCollector::default();
    for text in messages {
        let _ = PasswordForm::parse(&text);
        let Ok(message) = Message::parse(&text) else { continue };
        let again = message.to_text();
        assert_eq!(Message::parse(&again).expect("written").to_text(), again);
        match message {
            Message::PushReply(part) => {
                let Ok(Some(options)) = collector.handle_part(part) else { continue };
                options.iter().for_each(|option| push_option(option));
            }
            Message::PushUpdate(part) => {
                for option in &part.options {
                    push_option(&PushUpdateOption::parse(option).option);
                }
            }
            Message::InfoPre(content) => {
                let Some(step) = PendingStep::parse(&content) else { continue };
                let text = step.to_text();
                assert_eq!(PendingStep::parse(&text).map(|step| step.to_text()), Some(text));
            }
            _ => {}
        }
    }
}

fn push_option(text: &str) {
    let Ok(option) = PushOption::parse(text) else { return };
    let Ok(text) = option.to_text() else { return };
    let again = PushOption::parse(&text).expect("written");
    assert_eq!(again.to_text().as_ref(), Ok(&text));
}
