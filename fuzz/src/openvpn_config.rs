//! Files of OpenVPN. Input: kind 1 byte (a server, a client, a client's file at the server, a pool, a list of
//! ciphers, one line), then the text.

use weft_openvpn::config::{
    read_client_file, read_client_profile, read_pool_file, read_server_config, write_pool_file,
};
use weft_openvpn::{negotiation, words};

/// Each line of a report is a line of the text; what is written is read again.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    let count = text.lines().count();
    let mut files = |path: &str| match path {
        "self" => Ok(text.chars().take(2_000).collect()),
        _ => Err("no such file".to_owned()),
    };
    let lines = match kind % 6 {
        0 => read_server_config(&text, &mut files).lines,
        1 => read_client_profile(&text, &mut files).lines,
        2 => read_client_file(&text, &mut files).1,
        3 => {
            let entries = read_pool_file(&text).0;
            let written = write_pool_file(&entries);
            let again = read_pool_file(&written);
            assert!(again.1.is_empty());
            assert_eq!(write_pool_file(&again.0), written);
            return;
        }
        4 => {
            let Ok(ciphers) = negotiation::parse_ciphers(&text) else { return };
            assert_eq!(negotiation::parse_ciphers(&negotiation::list_of(&ciphers)), Ok(ciphers));
            return;
        }
        _ => {
            let Ok(words) = words::split(&text) else { return };
            let quoted: Result<Vec<String>, _> =
                words.iter().map(|word| words::quote(word)).collect();
            let Ok(quoted) = quoted else { return };
            assert_eq!(words::split(&quoted.join(" ")), Ok(words));
            return;
        }
    };
    assert!(
        lines
            .iter()
            .filter(|line| line.file.is_none())
            .all(|line| (1..=count.max(1)).contains(&line.line))
    );
}
